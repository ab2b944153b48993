{{/*
The fields that choose a node. Takes (dict "from" VALUES "labels" LABELS): LABELS select the pods. A spread
constraint without a labelSelector gets them as its selector.
*/}}
{{- define "minisgl.scheduling" -}}
{{- $fields := dict -}}
{{- range $name := list "priorityClassName" "schedulerName" "nodeSelector" "tolerations" "affinity" -}}
{{- with index $.from $name -}}{{- $_ := set $fields $name . -}}{{- end -}}
{{- end -}}
{{- $selector := dict "labelSelector" (dict "matchLabels" (.labels | fromYaml)) -}}
{{- $constraints := list -}}
{{- range .from.topologySpreadConstraints -}}
{{- $added := ternary (dict) $selector (hasKey . "labelSelector") -}}
{{- $constraints = append $constraints (merge (dict) . $added) -}}
{{- end -}}
{{- with $constraints -}}{{- $_ := set $fields "topologySpreadConstraints" . -}}{{- end -}}
{{- with $fields -}}{{- toYaml . -}}{{- end -}}
{{- end -}}
