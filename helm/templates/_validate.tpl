{{/*
Checks of values that contradict each other. Each check stops the rendering with a sentence that names the
values and the remedy. The type and the bounds of a single value are in values.schema.json. The checks of
the engine are in _validate_engine.tpl, those of replicas and exposure in _validate_replicas.tpl.
*/}}

{{- define "minisgl.validate" -}}
{{- include "minisgl.validateModel" . -}}
{{- include "minisgl.validateEngine" . -}}
{{- include "minisgl.validateFractions" . -}}
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
{{- fail "model.path is set, but no volume holds a model: set model.existingClaim, model.hostPath or model.image." -}}
{{- end -}}
{{- if and $model.hostPath (not (hasPrefix "/" $model.hostPath)) -}}
{{- fail (printf "model.hostPath is %s, but a folder on the node is an absolute path: begin it with a slash." $model.hostPath) -}}
{{- end -}}
{{- if and $model.id .Values.huggingface.offline (not .Values.cache.enabled) (not .Values.initContainers) -}}
{{- fail "huggingface.offline is true, but each pod starts with an empty cache and cannot download model.id: set cache.enabled=true and cache.existingClaim to a claim that contains the model, or use model.existingClaim." -}}
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

{{- define "minisgl.validateLifecycle" -}}
{{- $drain := .Values.drain -}}
{{- if le (int $drain.timeoutSeconds) (int $drain.graceSeconds) -}}
{{- fail "drain.timeoutSeconds is not longer than drain.graceSeconds, so the server would cut a request that it accepts at the end of the grace period: raise drain.timeoutSeconds." -}}
{{- end -}}
{{- $startup := .Values.startup -}}
{{- if lt (int $startup.budgetSeconds) (int $startup.periodSeconds) -}}
{{- fail (printf "startup.budgetSeconds is %d, but the startup probe asks only every %d s: raise startup.budgetSeconds, or lower startup.periodSeconds." (int $startup.budgetSeconds) (int $startup.periodSeconds)) -}}
{{- end -}}
{{- $strategy := .Values.strategy -}}
{{- $none := list "0" "0%" -}}
{{- if and (eq $strategy.type "RollingUpdate") (has (toString $strategy.maxSurge) $none) (has (toString $strategy.maxUnavailable) $none) -}}
{{- fail "strategy.maxSurge and strategy.maxUnavailable are both 0, so a rollout could not replace any pod: raise one of them." -}}
{{- end -}}
{{- if and (eq $strategy.type "RollingUpdate") (not (has (toString $strategy.maxSurge) $none)) (include "minisgl.cacheIsExclusive" .) -}}
{{- fail "strategy.maxSurge starts a second pod while the first holds the ReadWriteOnce cache: set strategy.maxSurge=0 or cache.accessModes=[ReadWriteMany]." -}}
{{- end -}}
{{- end -}}

{{/* "true" when the chart makes a claim that only the pods of one node can mount at the same time. */}}
{{- define "minisgl.cacheIsExclusive" -}}
{{- $cache := .Values.cache -}}
{{- if and $cache.enabled (not $cache.existingClaim) (not (has "ReadWriteMany" $cache.accessModes)) -}}true{{- end -}}
{{- end -}}
