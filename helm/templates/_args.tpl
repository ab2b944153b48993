{{/* Command line and environment of the server. `minisgl --help` lists the flags. */}}

{{/* "true" if a volume contains the model. */}}

{{- define "minisgl.modelVolume" -}}
{{- with .Values.model -}}
{{- if or .existingClaim .hostPath .image -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{/*
A flag or the value of a flag as text. Helm reads each number of a values file as a float and would print a
million as 1e+06. The template therefore converts a whole number to an integer first.
*/}}
{{- define "minisgl.word" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) -}}{{ int64 . }}{{- else -}}{{ . }}{{- end -}}
{{- end -}}

{{- define "minisgl.args" -}}
{{- $model := .Values.model -}}
{{- $server := .Values.server -}}
- {{ printf "--host=%s" $server.host | quote }}
- --port=1919
- --probe-port=1920
{{- if $model.id }}
- {{ printf "--model=%s" $model.id | quote }}
{{- with $model.revision }}
- {{ printf "--revision=%s" . | quote }}
{{- end }}
{{- else if include "minisgl.modelVolume" . }}
- {{ printf "/model/%s" (trimAll "/" $model.path) | trimSuffix "/" | printf "--model=%s" | quote }}
{{- end }}
{{- with $model.servedNames }}
- --served-model-name
{{- range . }}
- {{ . | quote }}
{{- end }}
{{- end }}
- --device={{ ternary "cuda" "cpu" .Values.gpu.enabled }}
- --tensor-parallel-size={{ int .Values.tensorParallelSize }}
{{- if .Values.gpu.enabled }}
- --memory-ratio={{ $server.memoryRatio }}
{{- end }}
{{- if not (kindIs "invalid" $server.maxSeqLen) }}
- --max-seq-len-override={{ int $server.maxSeqLen }}
{{- end }}
- --kv-cache-dtype={{ $server.kvCacheDtype }}
- --max-running-requests={{ int $server.maxRunningRequests }}
- --max-queued-requests={{ int $server.maxQueuedRequests }}
- --num-tokenizer={{ int $server.tokenizers }}
{{- with $server.quantization }}
- --quantization={{ . }}
{{- end }}
{{- with $server.speculative }}
- --speculative={{ . }}
{{- end }}
- --log-level={{ $server.logLevel }}
- --tool-format={{ $server.toolFormat }}
{{- if .Values.auth.keysSecret }}
- --api-key-file=/keys/keys
{{- end }}
- --cache-isolation={{ .Values.auth.cacheIsolation }}
{{- if $server.escapeSpecialTokens }}
- --escape-special-tokens
{{- end }}
{{- if not .Values.playground.enabled }}
- --no-playground
{{- end }}
{{- with $server.allowedOrigins }}
- --allow-origin
{{- range . }}
- {{ . | quote }}
{{- end }}
{{- end }}
{{- include "minisgl.kvEventsArgs" . }}
{{ include "minisgl.drainArgs" . }}
{{- range .Values.extraArgs }}
- {{ include "minisgl.word" . | quote }}
{{- end }}
{{- end -}}

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
