{{/* The bytes of a quantity of memory, such as 4Gi or 2.5G. */}}
{{- define "minisgl.bytes" -}}
{{- $text := include "minisgl.word" . -}}
{{- $number := regexFind "^[0-9]+([.][0-9]+)?" $text -}}
{{- $factors := dict "" 1 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $unit := trimPrefix $number $text -}}
{{- if or (not $number) (not (hasKey $factors $unit)) -}}
{{- fail (printf "resources contains the memory %s, to which hostCache.sizeGB cannot be added: write it as 4Gi or 4G." $text) -}}
{{- end -}}
{{- mulf (float64 $number) (get $factors $unit) | int64 -}}
{{- end -}}
