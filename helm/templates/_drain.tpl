{{/*
Flags of the server and fields of the pod for the start and the end of a pod: grace period, drain, probes. The
flags and the fields come from the same values, so they always agree.

The kubelet sends SIGKILL terminationGracePeriodSeconds after the deletion of the pod. That time includes the
preStop hook:

  |-- preStop --|-- grace: still accepting --|-- running requests end --|-- teardown --|
                ^ SIGTERM                                               ^ drain.timeoutSeconds after SIGTERM
*/}}

{{- define "minisgl.leastGracePeriod" -}}
{{- $drain := .Values.drain -}}
{{- add $drain.preStopSleepSeconds $drain.timeoutSeconds $drain.teardownSeconds -}}
{{- end -}}

{{- define "minisgl.terminationGracePeriodSeconds" -}}
{{- $least := include "minisgl.leastGracePeriod" . | int -}}
{{- $given := .Values.terminationGracePeriodSeconds -}}
{{- if kindIs "invalid" $given -}}
{{- $least -}}
{{- else -}}
{{- if lt (int $given) $least -}}
{{- fail (printf "terminationGracePeriodSeconds is %d, but preStop, drain and teardown take up to %d s: leave it null, or lower drain.*Seconds." (int $given) $least) -}}
{{- end -}}
{{- int $given -}}
{{- end -}}
{{- end -}}

{{- define "minisgl.drainArgs" -}}
- --drain-grace={{ int .Values.drain.graceSeconds }}
- --drain-timeout={{ int .Values.drain.timeoutSeconds }}
{{- end -}}

{{/* The kubelet itself executes a sleep action, so the image needs no shell. */}}
{{- define "minisgl.lifecycle" -}}
{{- if gt (int .Values.drain.preStopSleepSeconds) 0 -}}
lifecycle:
  preStop:
    sleep:
      seconds: {{ int .Values.drain.preStopSleepSeconds }}
{{- end -}}
{{- end -}}

{{- define "minisgl.startupFailures" -}}
{{- $startup := .Values.startup -}}
{{- div (add $startup.budgetSeconds $startup.periodSeconds -1) $startup.periodSeconds -}}
{{- end -}}

{{/* Longer than the start budget: a slow but healthy start must not count as a failed rollout. */}}
{{- define "minisgl.progressDeadlineSeconds" -}}
{{- add .Values.startup.budgetSeconds .Values.minReadySeconds (include "minisgl.leastGracePeriod" .) 60 -}}
{{- end -}}

{{/*
The startup probe asks /readyz, not /livez: /livez answers 200 while the model loads, so a probe of it would
not limit the start. While the startup probe fails, the kubelet runs neither of the other two probes.
The probes have a port of their own, so that clients cannot keep them out. The Service does not expose it.
*/}}
{{- define "minisgl.probes" -}}
startupProbe:
  httpGet: {path: /readyz, port: probes}
  periodSeconds: {{ .Values.startup.periodSeconds }}
  timeoutSeconds: 5
  failureThreshold: {{ include "minisgl.startupFailures" . }}
readinessProbe:
  httpGet: {path: /readyz, port: probes}
  {{- toYaml .Values.readiness | nindent 2 }}
livenessProbe:
  httpGet: {path: /livez, port: probes}
  {{- toYaml .Values.liveness | nindent 2 }}
{{- end -}}
