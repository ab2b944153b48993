{{/* Volumes, mounts and resources of the pod. */}}

{{- define "minisgl.volumes" -}}
- name: tmp
  emptyDir:
    sizeLimit: {{ .Values.tmp.size }}
- name: cache
  {{- if .Values.cache.enabled }}
  persistentVolumeClaim:
    claimName: {{ include "minisgl.cacheClaim" . | quote }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ .Values.cache.size }}
  {{- end }}
{{ with .Values.auth.keysSecret }}- {name: keys, secret: {secretName: {{ . | quote }}}}{{ end }}
{{- if gt (int .Values.tensorParallelSize) 1 }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .Values.shm.size }}
{{- end }}
{{- with .Values.model }}
{{- if .existingClaim }}
- name: model
  persistentVolumeClaim:
    claimName: {{ .existingClaim | quote }}
    readOnly: true
{{- else if .hostPath }}
- name: model
  hostPath:
    path: {{ .hostPath | quote }}
    type: Directory
{{- else if .image }}
- name: model
  image:
    reference: {{ .image | quote }}
    pullPolicy: IfNotPresent
{{- end }}
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "minisgl.volumeMounts" -}}
- name: tmp
  mountPath: /tmp
- name: cache
  mountPath: /cache
{{ with .Values.auth.keysSecret }}- {name: keys, mountPath: /keys, readOnly: true}{{ end }}
{{- if gt (int .Values.tensorParallelSize) 1 }}
- name: shm
  mountPath: /dev/shm
{{- end }}
{{- if include "minisgl.modelVolume" . }}
- name: model
  mountPath: /model
  readOnly: true
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "minisgl.gpuCount" -}}
{{- if and .Values.gpu.enabled .Values.gpu.resourceName -}}
{{- ternary .Values.tensorParallelSize .Values.gpu.count (kindIs "invalid" .Values.gpu.count) | int -}}
{{- end -}}
{{- end -}}

{{/*
Adds the GPUs to the limits, and the host cache to the memory. The API server copies the GPUs to the requests, which
must have the same number.
*/}}
{{- define "minisgl.resources" -}}
{{- $resources := deepCopy (.Values.resources | default dict) -}}
{{- if .Values.hostCache.sizeGB -}}
{{- range $part := list "requests" "limits" -}}
{{- with get (get $resources $part | default dict) "memory" -}}
{{- $bytes := add (include "minisgl.bytes" . | int64) (mul (int64 $.Values.hostCache.sizeGB) 1000000000) -}}
{{- $_ := set (get $resources $part) "memory" (toString $bytes) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with include "minisgl.gpuCount" . -}}
{{- $limits := merge (dict $.Values.gpu.resourceName (int .)) ($resources.limits | default dict) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- if .Values.resourceClaims -}}
{{- $claims := list -}}
{{- range .Values.resourceClaims -}}{{- $claims = append $claims (dict "name" .name) -}}{{- end -}}
{{- $_ := set $resources "claims" $claims -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "minisgl.strategy" -}}
type: {{ .Values.strategy.type }}
{{- if eq .Values.strategy.type "RollingUpdate" }}
rollingUpdate:
  maxSurge: {{ .Values.strategy.maxSurge }}
  maxUnavailable: {{ .Values.strategy.maxUnavailable }}
{{- end }}
{{- end -}}

{{- define "minisgl.podAnnotations" -}}
kubectl.kubernetes.io/default-container: minisgl
{{- if .Values.auth.apiKey }}
checksum/api-key: {{ list .Release.Namespace .Release.Name .Values.auth.apiKey | toJson | sha256sum }}
{{- end }}
{{- if .Values.huggingface.token }}
checksum/huggingface: {{ list .Release.Namespace .Release.Name .Values.huggingface.token | toJson | sha256sum }}
{{- end }}
{{- if and .Values.metrics.annotations (not (or .Values.metrics.podMonitor.enabled .Values.metrics.serviceMonitor.enabled)) }}
prometheus.io/scrape: "true"
prometheus.io/path: /metrics
prometheus.io/port: "1919"
{{- end }}
{{- end -}}
