{{/* Adds at most as many pods a minute as run, and removes one pod a minute: a removed pod loses its prefix cache. */}}
{{- define "minisgl.scalingBehavior" -}}
scaleUp:
  stabilizationWindowSeconds: {{ .Values.autoscaling.scaleUpWindowSeconds }}
  policies:
    - {type: Percent, value: 100, periodSeconds: 60}
    - {type: Pods, value: 1, periodSeconds: 60}
scaleDown:
  stabilizationWindowSeconds: {{ .Values.autoscaling.scaleDownWindowSeconds }}
  policies:
    - {type: Pods, value: 1, periodSeconds: 60}
{{- end -}}
