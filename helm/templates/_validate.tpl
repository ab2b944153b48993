{{/*
Values that contradict each other stop the rendering with a sentence that says the remedy. What a
single value may be is in values.schema.json.
*/}}

{{- define "minisgl.validate" -}}
{{- include "minisgl.validateModel" . -}}
{{- include "minisgl.validateEngine" . -}}
{{- include "minisgl.validateLifecycle" . -}}
{{- include "minisgl.validateReplicas" . -}}
{{- include "minisgl.validateExposure" . -}}
{{- end -}}

{{- define "minisgl.validateModel" -}}
{{- $model := .Values.model -}}
{{- $sources := list -}}
{{- range $name := list "id" "existingClaim" "hostPath" "image" -}}
{{- if index $model $name }}{{- $sources = append $sources (printf "model.%s" $name) -}}{{- end -}}
{{- end -}}
{{- if gt (len $sources) 1 -}}
{{- fail (printf "%s are set together, but a model has one source: keep one of them." (join " and " $sources)) -}}
{{- end -}}
{{- if and $model.revision (not $model.id) -}}
{{- fail "model.revision is set without model.id: a revision belongs to a Hugging Face id, so set model.id or remove it." -}}
{{- end -}}
{{- if and $model.path (not (include "minisgl.modelVolume" .)) -}}
{{- fail "model.path is set, but there is no volume that it could be in: set model.existingClaim, model.hostPath or model.image." -}}
{{- end -}}
{{- if and $model.id .Values.huggingface.offline (not .Values.cache.enabled) (not .Values.initContainers) -}}
{{- fail "huggingface.offline is true, but each pod starts with an empty cache: set cache.enabled with a filled cache.existingClaim, or use model.existingClaim." -}}
{{- end -}}
{{- if and .Values.cache.existingClaim (not .Values.cache.enabled) -}}
{{- fail "cache.existingClaim is set, but cache.enabled is false, so each pod would have an empty cache of its own: set cache.enabled=true." -}}
{{- end -}}
{{- if and .Values.huggingface.existingSecret .Values.huggingface.token -}}
{{- fail "huggingface.existingSecret and huggingface.token are both set: keep existingSecret and remove token." -}}
{{- end -}}
{{- if and .Values.auth.existingSecret .Values.auth.apiKey -}}
{{- fail "auth.existingSecret and auth.apiKey are both set: keep existingSecret and remove apiKey." -}}
{{- end -}}
{{- end -}}

{{/* Flags that belong to a value of the chart, by that value. */}}
{{- define "minisgl.flags" -}}
model.id: --model --model-path
model.revision: --revision
model.servedNames: --served-model-name
gpu.enabled: --device
tensorParallelSize: --tensor-parallel-size --tp-size --tp
server.memoryRatio: --memory-ratio
server.maxSeqLen: --max-seq-len-override
server.maxRunningRequests: --max-running-requests
server.maxQueuedRequests: --max-queued-requests
server.tokenizers: --num-tokenizer --tokenizer-count
server.logLevel: --log-level
server.host: --host
service.port: --port
drain.graceSeconds: --drain-grace
drain.timeoutSeconds: --drain-timeout
auth.existingSecret: --api-key-file --api-key
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
{{- end -}}
{{- range $part := list "limits" "requests" -}}
{{- if hasKey (get ($.Values.resources | default dict) $part | default dict) ($gpu.resourceName | default "nvidia.com/gpu") -}}
{{- fail (printf "resources.%s names GPUs, which tensorParallelSize gives: remove it there, or set gpu.count." $part) -}}
{{- end -}}
{{- end -}}
{{- if and $gpu.enabled (not $gpu.resourceName) (not .Values.resourceClaims) -}}
{{- fail "gpu.resourceName is empty and there are no resourceClaims, so the pod would get no GPU: set one of the two, or gpu.enabled=false." -}}
{{- end -}}
{{- range .Values.extraArgs -}}
{{- $flag := splitList "=" (toString .) | first -}}
{{- range $value, $flags := include "minisgl.flags" $ | fromYaml -}}
{{- if has $flag (splitList " " $flags) -}}
{{- fail (printf "extraArgs gives %s, which belongs to a value of the chart: set %s instead." $flag $value) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "minisgl.validateLifecycle" -}}
{{- $drain := .Values.drain -}}
{{- if le (int $drain.timeoutSeconds) (int $drain.graceSeconds) -}}
{{- fail "drain.timeoutSeconds is not longer than drain.graceSeconds, so requests accepted in the grace would be cut at once: raise timeoutSeconds." -}}
{{- end -}}
{{- $strategy := .Values.strategy -}}
{{- $none := list "0" "0%" -}}
{{- if and (eq $strategy.type "RollingUpdate") (has (toString $strategy.maxSurge) $none) (has (toString $strategy.maxUnavailable) $none) -}}
{{- fail "strategy.maxSurge and strategy.maxUnavailable are both 0, so a rollout could never move: raise one of them." -}}
{{- end -}}
{{- if and (eq $strategy.type "RollingUpdate") (not (has (toString $strategy.maxSurge) $none)) (include "minisgl.cacheIsExclusive" .) -}}
{{- fail "strategy.maxSurge starts a second pod while the first holds the ReadWriteOnce cache: set strategy.maxSurge=0 or cache.accessModes=[ReadWriteMany]." -}}
{{- end -}}
{{- end -}}

{{/* True when the chart makes a claim that pods of two nodes cannot mount together. */}}
{{- define "minisgl.cacheIsExclusive" -}}
{{- $cache := .Values.cache -}}
{{- if and $cache.enabled (not $cache.existingClaim) (not (has "ReadWriteMany" $cache.accessModes)) -}}true{{- end -}}
{{- end -}}
