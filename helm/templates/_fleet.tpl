{{/* The event stream, and the pods that only tokenize prompts. */}}

{{- define "minisgl.kvEventsArgs" -}}
{{- if .Values.kvEvents.enabled }}
- --kv-events-endpoint=tcp://*:5557
- --kv-events-replay-endpoint=tcp://*:5558
- --kv-events-pod=$(POD_IP):1919
{{- end }}
{{- end -}}

{{/* Name and selector of the pods that only tokenize prompts. */}}
{{- define "minisgl.renderName" -}}
{{- printf "%s-render" (include "minisgl.fullname" .) -}}
{{- end -}}

{{- define "minisgl.renderLabels" -}}
app.kubernetes.io/name: {{ printf "%s-render" (include "minisgl.name" . | trunc 51) | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}
