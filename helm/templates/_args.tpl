{{/* Command line of the server. `minisgl --help` lists the flags. */}}

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
{{- with .Values.hostCache.sizeGB }}
- --host-cache-gb={{ int . }}
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
