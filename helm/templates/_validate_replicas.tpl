{{/* Checks of values that contradict each other, continued from _validate.tpl: replicas and exposure. */}}

{{- define "minisgl.validateReplicas" -}}
{{- $most := include "minisgl.mostPods" . | int -}}
{{- if and (gt $most 1) (include "minisgl.cacheIsExclusive" .) -}}
{{- fail (printf "Up to %d pods would share a cache that only one node can mount: set cache.accessModes=[ReadWriteMany], or cache.enabled=false for a cache per pod." $most) -}}
{{- end -}}
{{- if and .Values.render.enabled (include "minisgl.cacheIsExclusive" .) -}}
{{- fail "render.enabled adds pods that would share a cache that only one node can mount: set cache.accessModes=[ReadWriteMany], or cache.enabled=false for a cache per pod." -}}
{{- end -}}
{{- $scaling := .Values.autoscaling -}}
{{- if and $scaling.hpa.enabled $scaling.keda.enabled -}}
{{- fail "autoscaling.hpa.enabled and autoscaling.keda.enabled are both true, and both would change the number of replicas: disable one." -}}
{{- end -}}
{{- if and $scaling.keda.enabled (not $scaling.keda.prometheusAddress) -}}
{{- fail "autoscaling.keda.enabled is true, but KEDA needs a Prometheus for its queries: set autoscaling.keda.prometheusAddress." -}}
{{- end -}}
{{- if gt (int $scaling.minReplicas) (int $scaling.maxReplicas) -}}
{{- fail "autoscaling.minReplicas is larger than autoscaling.maxReplicas: lower minReplicas or raise maxReplicas." -}}
{{- end -}}
{{- $budget := .Values.podDisruptionBudget -}}
{{- if $budget.enabled -}}
{{- if and (not (kindIs "invalid" $budget.minAvailable)) (not (kindIs "invalid" $budget.maxUnavailable)) -}}
{{- fail "podDisruptionBudget.minAvailable and maxUnavailable are both set, but Kubernetes accepts only one: set the other to null." -}}
{{- end -}}
{{- if and (kindIs "invalid" $budget.minAvailable) (kindIs "invalid" $budget.maxUnavailable) -}}
{{- fail "podDisruptionBudget.minAvailable and maxUnavailable are both null: set one, or podDisruptionBudget.enabled=false." -}}
{{- end -}}
{{- if has (toString $budget.maxUnavailable) (list "0" "0%") -}}
{{- fail "podDisruptionBudget.maxUnavailable is 0, so no node could ever be drained: raise maxUnavailable." -}}
{{- end -}}
{{- $least := toString $budget.minAvailable -}}
{{- if hasSuffix "%" $least -}}
{{- $least = div (trimSuffix "%" $least | mul $most | add 99) 100 -}}{{/* Kubernetes rounds up */}}
{{- end -}}
{{- if and (gt $most 1) (ge (int $least) $most) -}}
{{- fail "podDisruptionBudget.minAvailable covers all pods, so no node could ever be drained: lower minAvailable, or set maxUnavailable instead." -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "minisgl.validateExposure" -}}
{{- $service := include "minisgl.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $service) -}}
{{- fail (printf "The name of the Service would be %s, but a Service name begins with a letter and contains only a-z, 0-9 and \"-\": set fullnameOverride." $service) -}}
{{- end -}}
{{- if and .Values.metrics.podMonitor.enabled .Values.metrics.serviceMonitor.enabled -}}
{{- fail "metrics.podMonitor.enabled and metrics.serviceMonitor.enabled are both true, and Prometheus would count every sample twice: keep podMonitor." -}}
{{- end -}}
{{- range $name := list "podMonitor" "serviceMonitor" -}}
{{- $monitor := index $.Values.metrics $name -}}
{{- if gt (include "minisgl.milliseconds" $monitor.scrapeTimeout | int64) (include "minisgl.milliseconds" $monitor.interval | int64) -}}
{{- fail (printf "metrics.%s.scrapeTimeout is %s, but the interval is %s, and Prometheus refuses a longer time limit: lower scrapeTimeout, or raise interval." $name $monitor.scrapeTimeout $monitor.interval) -}}
{{- end -}}
{{- end -}}
{{- $downloads := and .Values.model.id (not .Values.huggingface.offline) -}}
{{- $policy := .Values.networkPolicy -}}
{{- if and $downloads $policy.enabled (not $policy.allowHTTPS) (not $policy.extraEgress) -}}
{{- fail "networkPolicy.allowHTTPS is false, so the pods could not download model.id: allow a mirror of the hub in networkPolicy.extraEgress, or set huggingface.offline=true and fill the cache." -}}
{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.hosts) -}}
{{- fail "ingress.enabled is true, but no host is given: set ingress.hosts." -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}
{{- fail "httpRoute.enabled is true, but no Gateway is given: set httpRoute.parentRefs." -}}
{{- end -}}
{{- $labels := include "minisgl.merged" (list .Values.podLabels .Values.commonLabels) | fromYaml -}}
{{- range $name := list "app.kubernetes.io/name" "app.kubernetes.io/instance" "llm-d.ai/engine-type" -}}
{{- if hasKey $labels $name -}}
{{- fail (printf "podLabels or commonLabels contain %s, which the chart sets itself: remove that label there." $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
