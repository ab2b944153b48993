{{/*
Names and labels. Every helper takes the root context. Templates quote each name that a user chooses: without
quotes, YAML reads a namespace 2024 as a number.
*/}}

{{/* At most 58 characters: a label value has at most 63, and the pod of `helm test` appends "-test". */}}
{{- define "minisgl.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 58 | trimSuffix "-" -}}
{{- end -}}

{{/*
"minisgl" for a release named minisgl, "RELEASE-minisgl" for others. At most 46 characters: a pod's name is
NAME-HASH-HASH, Kubernetes cuts it at 63 characters, and promSelector matches the whole name.
*/}}
{{- define "minisgl.fullname" -}}
{{- $name := include "minisgl.name" . -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default $full .Values.fullnameOverride | trunc 46 | trimSuffix "-" -}}
{{- end -}}

{{/* The selector. It has only name and instance, because the selector of a Deployment can never change. */}}
{{- define "minisgl.selectorLabels" -}}
app.kubernetes.io/name: {{ include "minisgl.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "minisgl.labels" -}}
{{ include "minisgl.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: minisgl
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/*
Labels of the pods. They contain no chart version, so that a new chart version alone restarts no pod. The
endpoint picker selects its mapping of metrics by llm-d.ai/engine-type.
*/}}
{{- define "minisgl.podLabels" -}}
{{ include "minisgl.selectorLabels" . }}
app.kubernetes.io/part-of: minisgl
llm-d.ai/engine-type: minisgl
{{- end -}}

{{/* Merges a list of maps. If several maps contain a key, the first of them gives the value. */}}
{{- define "minisgl.merged" -}}
{{- $merged := dict -}}
{{- range . -}}{{- $merged = merge $merged (. | default dict) -}}{{- end -}}
{{- toYaml $merged -}}
{{- end -}}

{{/* metadata of an object. Takes (dict "root" $), and optionally name, namespace, labels, annotations. */}}
{{- define "minisgl.metadata" -}}
{{- $labels := include "minisgl.labels" .root | fromYaml -}}
name: {{ .name | default (include "minisgl.fullname" .root) | quote }}
namespace: {{ .namespace | default .root.Release.Namespace | quote }}
labels:
  {{- include "minisgl.merged" (list .labels .root.Values.commonLabels $labels) | nindent 2 }}
{{- with .annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "minisgl.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository (default .Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end -}}

{{- define "minisgl.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "minisgl.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "minisgl.cacheClaim" -}}
{{- default (printf "%s-cache" (include "minisgl.fullname" .)) .Values.cache.existingClaim -}}
{{- end -}}

{{/* Name of the Secret that contains the hub's token. Empty: no token. */}}
{{- define "minisgl.huggingfaceSecret" -}}
{{- $made := printf "%s-huggingface" (include "minisgl.fullname" .) -}}
{{- .Values.huggingface.existingSecret | default (ternary $made "" (ne .Values.huggingface.token "")) -}}
{{- end -}}

{{/* Name of the Secret that contains the API key. Empty: no key. */}}
{{- define "minisgl.apiKeySecret" -}}
{{- $made := printf "%s-api-key" (include "minisgl.fullname" .) -}}
{{- .Values.auth.existingSecret | default (ternary $made "" (ne .Values.auth.apiKey "")) -}}
{{- end -}}

{{- define "minisgl.endpointPicker" -}}
{{- default (printf "%s-epp" (include "minisgl.fullname" .)) .Values.inferencePool.endpointPicker.name -}}
{{- end -}}

{{/* Largest number of pods outside of a rollout. */}}
{{- define "minisgl.mostPods" -}}
{{- $scaled := or .Values.autoscaling.hpa.enabled .Values.autoscaling.keda.enabled -}}
{{- ternary .Values.autoscaling.maxReplicas .Values.replicas $scaled | int -}}
{{- end -}}

{{/* PromQL matchers of this release's pods. The pods of a Deployment are named NAME-HASH-HASH. */}}
{{- define "minisgl.promSelector" -}}
{{- printf "namespace=\"%s\",pod=~\"%s-[a-z0-9]+-[a-z0-9]+\"" .Release.Namespace (include "minisgl.fullname" .) -}}
{{- end -}}

{{/* Labels of the pod of `helm test`. They do not match the selector of the server's pods. */}}
{{- define "minisgl.testLabels" -}}
app.kubernetes.io/name: {{ include "minisgl.name" . }}-test
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}
