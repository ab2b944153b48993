{{/* The event stream, and the pods that only tokenize prompts. */}}

{{- define "minisgl.kvEventsArgs" -}}
{{- if .Values.kvEvents.enabled }}
- --kv-events-endpoint=tcp://*:5557
- --kv-events-replay-endpoint=tcp://*:5558
- --kv-events-pod=$(POD_IP):1919
{{- end }}
{{- end -}}

{{/*
Name and selector of the pods that only tokenize prompts. With at most 46 characters, no name of a pod is cut,
so promSelector of the engine's pods never matches these pods.
*/}}
{{- define "minisgl.renderName" -}}
{{- printf "%s-render" (include "minisgl.fullname" . | trunc 39 | trimSuffix "-") -}}
{{- end -}}

{{- define "minisgl.renderLabels" -}}
app.kubernetes.io/name: {{ printf "%s-render" (include "minisgl.name" . | trunc 51) | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{/* The fields of render.scheduling, and the release's tolerations, priority class and scheduler without an entry. */}}
{{- define "minisgl.renderScheduling" -}}
{{- $fields := deepCopy (.Values.render.scheduling | default dict) -}}
{{- range $name := list "tolerations" "priorityClassName" "schedulerName" -}}
{{- if not (hasKey $fields $name) -}}{{- $_ := set $fields $name (index $.Values $name) -}}{{- end -}}
{{- end -}}
{{- toYaml $fields -}}
{{- end -}}

{{/* Selector of all pods of the release that serve HTTP: the engine's pods and the render pods. */}}
{{- define "minisgl.servingSelector" -}}
{{- if .Values.render.enabled -}}
matchLabels:
  app.kubernetes.io/instance: {{ .Release.Name | quote }}
matchExpressions:
  - key: app.kubernetes.io/name
    operator: In
    values:
      - {{ get (include "minisgl.selectorLabels" . | fromYaml) "app.kubernetes.io/name" | quote }}
      - {{ get (include "minisgl.renderLabels" . | fromYaml) "app.kubernetes.io/name" | quote }}
{{- else -}}
matchLabels:
  {{- include "minisgl.selectorLabels" . | nindent 2 }}
{{- end -}}
{{- end -}}

{{/* PromQL matchers of the render pods. */}}
{{- define "minisgl.renderPromSelector" -}}
{{- printf "namespace=\"%s\",pod=~\"%s-[a-z0-9]+-[a-z0-9]+\"" .Release.Namespace (include "minisgl.renderName" .) -}}
{{- end -}}
