{{/* Labels and annotations of one alert. Takes (dict "root" $ "name" NAME "severity" S "summary" TEXT). */}}
{{- define "minisgl.alertMeta" -}}
labels:
  severity: {{ .severity }}
  namespace: {{ .root.Release.Namespace }}
  release: {{ .root.Release.Name }}
  {{- with .root.Values.prometheusRule.alertLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  summary: {{ .summary | quote }}
  runbook_url: {{ printf "%s#%s" .root.Values.prometheusRule.runbookURL (lower .name) | quote }}
{{- end -}}
