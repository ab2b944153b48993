{{/* Checks of the engine's values, continued from _validate.tpl: GPUs, address, flags, fractions. */}}

{{/* The values from which the chart sets flags, and the flags of each. extraArgs may not contain these flags. */}}
{{- define "minisgl.flags" -}}
model.id: --model --model-path -m
model.revision: --revision
model.servedNames: --served-model-name
gpu.enabled: --device
tensorParallelSize: --tensor-parallel-size --tp-size --tp -tp
server.memoryRatio: --memory-ratio --gpu-memory-utilization --mem-fraction-static
server.kvCacheDtype: --kv-cache-dtype
server.maxSeqLen: --max-seq-len-override --max-model-len --context-length --context
server.maxRunningRequests: --max-running-requests --max-num-seqs
server.maxQueuedRequests: --max-queued-requests
server.tokenizers: --num-tokenizer --tokenizer-count
server.quantization: --quantization
server.speculative: --speculative
hostCache.sizeGB: --host-cache-gb
server.logLevel: --log-level
server.toolFormat: --tool-format
server.escapeSpecialTokens: --escape-special-tokens
server.allowedOrigins: --allow-origin
playground.enabled: --no-playground
server.host: --host
kvEvents.enabled: --kv-events-endpoint --kv-events-replay-endpoint --kv-events-pod
render.enabled: --render-only
service.port: --port
drain.graceSeconds: --drain-grace
drain.timeoutSeconds: --drain-timeout
auth.existingSecret: --api-key
auth.keysSecret: --api-key-file
auth.cacheIsolation: --cache-isolation
auth.adminSecret: --admin-api-key --admin-api-key-file
ingress.tls: --ssl-certfile --ssl-keyfile
{{- end -}}

{{- define "minisgl.validateEngine" -}}
{{- $size := int .Values.tensorParallelSize -}}
{{- $gpu := .Values.gpu -}}
{{- with include "minisgl.gpuCount" . -}}
{{- if lt (int .) $size -}}
{{- fail (printf "gpu.count is %d, but tensorParallelSize is %d and each rank needs a GPU of its own: leave gpu.count null." (int .) $size) -}}
{{- end -}}
{{- if gt (int .) $size -}}
{{- fail (printf "gpu.count is %d, but tensorParallelSize is %d, so the other GPUs would stay idle: raise tensorParallelSize, or leave gpu.count null." (int .) $size) -}}
{{- end -}}
{{- end -}}
{{- range $part := list "limits" "requests" -}}
{{- if hasKey (get ($.Values.resources | default dict) $part | default dict) ($gpu.resourceName | default "nvidia.com/gpu") -}}
{{- fail (printf "resources.%s contains GPUs, but the chart requests the GPUs itself: remove them there and set tensorParallelSize." $part) -}}
{{- end -}}
{{- end -}}
{{- if and $gpu.enabled (not $gpu.resourceName) (not .Values.resourceClaims) -}}
{{- fail "gpu.resourceName and resourceClaims are both empty, so the pod would get no GPU: set one of the two, or gpu.enabled=false." -}}
{{- end -}}
{{- $host := lower .Values.server.host | trimPrefix "[" | trimSuffix "]" | trimSuffix "." -}}
{{- if or (regexMatch "^(localhost|.*\\.localhost|localhost\\.localdomain|ip6-(localhost|loopback))$" $host) (regexMatch "^(::ffff:)?127\\.[0-9.]+$" $host) (regexMatch "^[0:]*:0*1$" $host) -}}
{{- fail (printf "server.host is %s, which is reachable only inside the pod: the probes and the Service would not reach the server. Set 0.0.0.0, or \"::\" for IPv6." .Values.server.host) -}}
{{- end -}}
{{- if and (eq .Values.auth.cacheIsolation "key") (not .Values.auth.keysSecret) (not (include "minisgl.apiKeySecret" .)) (not .Values.extraEnv) (not .Values.extraEnvFrom) -}}
{{- fail "auth.cacheIsolation is key, but the release has no API key, so it would separate no client: set auth.keysSecret, or auth.cacheIsolation=none." -}}
{{- end -}}
{{- range .Values.extraArgs -}}
{{- $flag := splitList "=" (toString .) | first -}}
{{- if eq $flag "--probe-port" -}}
{{- fail "extraArgs contains --probe-port, but the probes of the chart always use port 1920, which no Service exposes: remove the flag." -}}
{{- end -}}
{{- range $value, $flags := include "minisgl.flags" $ | fromYaml -}}
{{- if has $flag (splitList " " $flags) -}}
{{- fail (printf "extraArgs contains %s, which the chart sets from a value: set %s instead." $flag $value) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
Bounds of the values that may be fractions. `--set` passes a fraction as a string, and a JSON schema has
no bounds for strings. The bounds are those of the flag --memory-ratio, of a share, and of the last bucket of each
histogram.
*/}}
{{- define "minisgl.validateFractions" -}}
{{- $ratio := float64 .Values.server.memoryRatio -}}
{{- if or (lt $ratio 0.01) (gt $ratio 1.0) -}}
{{- fail (printf "server.memoryRatio is %v, but it is a share of the GPU's free memory: set a number from 0.01 to 1." $ratio) -}}
{{- end -}}
{{- $rule := .Values.prometheusRule -}}
{{- $errors := float64 $rule.errorRatio -}}
{{- if or (le $errors 0.0) (gt $errors 1.0) -}}
{{- fail (printf "prometheusRule.errorRatio is %v, but it is a share of the requests: set a number above 0 and up to 1." $errors) -}}
{{- end -}}
{{- range $name, $last := dict "ttftSeconds" 160.0 "itlSeconds" 10.0 -}}
{{- $seconds := index $rule $name | float64 -}}
{{- if or (le $seconds 0.0) (ge $seconds $last) -}}
{{- fail (printf "prometheusRule.%s is %v, but the metric measures up to %v s: set a number above 0 and below %v." $name $seconds $last $last) -}}
{{- end -}}
{{- end -}}
{{- end -}}
