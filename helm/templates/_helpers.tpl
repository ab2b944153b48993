{{/*
Names and labels. Every helper takes the root context. What the user names is quoted wherever it is
printed: a namespace 2024 would be a number.
*/}}

{{/* 58 characters: a label has 63 at most, and the test's is this name and "-test". */}}
{{- define "minisgl.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 58 | trimSuffix "-" -}}
{{- end -}}

{{/*
"minisgl" for a release named minisgl, "RELEASE-minisgl" for others. With 46 characters the names of
the pods, NAME-HASH-HASH, stay whole: Kubernetes cuts them at 63, and promSelector reads them.
*/}}
{{- define "minisgl.fullname" -}}
{{- $name := include "minisgl.name" . -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default $full .Values.fullnameOverride | trunc 46 | trimSuffix "-" -}}
{{- end -}}

{{/* Name and instance only: a Deployment's selector can never be changed. */}}
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
Labels of the pods: no chart version, so that a new chart alone restarts nothing. engine-type tells
the endpoint picker which mapping of metrics is ours.
*/}}
{{- define "minisgl.podLabels" -}}
{{ include "minisgl.selectorLabels" . }}
app.kubernetes.io/part-of: minisgl
llm-d.ai/engine-type: minisgl
{{- end -}}

{{/* Several maps as one: takes a list of them, of which the first that has a key gives its value. */}}
{{- define "minisgl.merged" -}}
{{- $merged := dict -}}
{{- range . -}}{{- $merged = merge $merged (. | default dict) -}}{{- end -}}
{{- toYaml $merged -}}
{{- end -}}

{{/* metadata of an object. Takes (dict "root" $), with name, namespace, labels, annotations. */}}
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

{{/* Name of the Secret that holds the hub's token or the API key; empty: there is none. */}}
{{- define "minisgl.huggingfaceSecret" -}}
{{- $made := printf "%s-huggingface" (include "minisgl.fullname" .) -}}
{{- .Values.huggingface.existingSecret | default (ternary $made "" (ne .Values.huggingface.token "")) -}}
{{- end -}}

{{- define "minisgl.apiKeySecret" -}}
{{- $made := printf "%s-api-key" (include "minisgl.fullname" .) -}}
{{- .Values.auth.existingSecret | default (ternary $made "" (ne .Values.auth.apiKey "")) -}}
{{- end -}}

{{- define "minisgl.endpointPicker" -}}
{{- default (printf "%s-epp" (include "minisgl.fullname" .)) .Values.inferencePool.endpointPicker.name -}}
{{- end -}}

{{/* The most pods that can run at a time, rollouts aside. */}}
{{- define "minisgl.mostPods" -}}
{{- $scaled := or .Values.autoscaling.hpa.enabled .Values.autoscaling.keda.enabled -}}
{{- ternary .Values.autoscaling.maxReplicas .Values.replicas $scaled | int -}}
{{- end -}}

{{/* PromQL matchers of this release's pods: a Deployment's pods are NAME-HASH-HASH. */}}
{{- define "minisgl.promSelector" -}}
{{- printf "namespace=\"%s\",pod=~\"%s-[a-z0-9]+-[a-z0-9]+\"" .Release.Namespace (include "minisgl.fullname" .) -}}
{{- end -}}

{{/* Labels of the test's pod, which no selector of the server finds. */}}
{{- define "minisgl.testLabels" -}}
app.kubernetes.io/name: {{ include "minisgl.name" . }}-test
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}
