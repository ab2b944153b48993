{{/* At most twice the pods a minute, and one away a minute: a removal throws a warm cache away. */}}
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
