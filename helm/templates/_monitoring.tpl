{{/*
Labels and annotations of one alert. Takes (dict "root" $ "name" NAME "severity" S "summary" TEXT), and
optionally "description" TEXT.
*/}}
{{- define "minisgl.alertMeta" -}}
{{- $labels := dict "severity" .severity "namespace" .root.Release.Namespace "release" .root.Release.Name -}}
labels:
  {{- include "minisgl.merged" (list .root.Values.prometheusRule.alertLabels $labels) | nindent 2 }}
annotations:
  summary: {{ .summary | quote }}
  {{- with .description }}
  description: {{ . | quote }}
  {{- end }}
  runbook_url: {{ printf "%s#%s" .root.Values.prometheusRule.runbookURL (lower .name) | quote }}
{{- end -}}

{{/* A duration of Prometheus, such as 1m30s, in milliseconds. Empty: 0. */}}
{{- define "minisgl.milliseconds" -}}
{{- $total := 0 -}}
{{- range regexFindAll "[0-9]+(ms|h|m|s)" (. | default "") -1 -}}
{{- $unit := index (dict "h" 3600000 "m" 60000 "s" 1000 "ms" 1) (regexFind "[a-z]+" .) -}}
{{- $total = add $total (mul (regexFind "[0-9]+" . | int64) $unit) -}}
{{- end -}}
{{- $total -}}
{{- end -}}

{{/* The endpoint that a monitor scrapes. Takes metrics.podMonitor or metrics.serviceMonitor. */}}
{{- define "minisgl.scrape" -}}
port: http
path: /metrics
interval: {{ .interval }}
honorLabels: {{ .honorLabels }}
{{- with .scrapeTimeout }}
scrapeTimeout: {{ . }}
{{- end }}
{{- with .relabelings }}
relabelings:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .metricRelabelings }}
metricRelabelings:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
