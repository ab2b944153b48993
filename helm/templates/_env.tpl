{{/* Environment of the server. */}}

{{/* An environment variable from a Secret. Takes (list VARIABLE SECRET KEY). Empty if SECRET is empty. */}}
{{- define "minisgl.secretVariable" -}}
{{- if index . 1 -}}
- name: {{ index . 0 }}
  valueFrom:
    secretKeyRef:
      name: {{ index . 1 | quote }}
      key: {{ index . 2 | quote }}
{{- end -}}
{{- end -}}

{{/*
Environment that the chart sets itself. HOME and all caches are under /cache, because the root file system
is read-only.
*/}}
{{- define "minisgl.ownEnv" -}}
env:
{{- range $name, $folder := dict "HOME" "" "HF_HOME" "/huggingface" "XDG_CACHE_HOME" "/xdg" "TRITON_CACHE_DIR" "/triton" "TORCHINDUCTOR_CACHE_DIR" "/inductor" "FLASHINFER_WORKSPACE_BASE" "/flashinfer" "CUDA_CACHE_PATH" "/cuda" }}
- name: {{ $name }}
  value: /cache{{ $folder }}
{{- end }}
{{- if .Values.kvEvents.enabled }}
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
{{- end }}
{{- if or .Values.huggingface.offline (not .Values.model.id) }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- end }}
{{ include "minisgl.secretVariable" (list "HF_TOKEN" (include "minisgl.huggingfaceSecret" .) .Values.huggingface.key) }}
{{ include "minisgl.secretVariable" (list "MINISGL_API_KEY" (include "minisgl.apiKeySecret" .) .Values.auth.key) }}
{{ include "minisgl.secretVariable" (list "MINISGL_ADMIN_API_KEY" .Values.auth.adminSecret .Values.auth.adminSecretKey) }}
{{- end -}}

{{/* The chart's own variables and extraEnv. A variable in extraEnv replaces the chart's variable of that name. */}}
{{- define "minisgl.env" -}}
{{- $env := .Values.extraEnv | default list -}}
{{- $given := list -}}
{{- range $env -}}{{- $given = append $given .name -}}{{- end -}}
{{- range (include "minisgl.ownEnv" . | fromYaml).env | reverse -}}
{{- if not (has .name $given) -}}{{- $env = prepend $env . -}}{{- end -}}
{{- end -}}
{{- toYaml $env -}}
{{- end -}}
