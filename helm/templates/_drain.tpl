{{/*
All that depends on how long a pod takes to stop or to start. The flags of the server and the
fields of the pod come from the same values, so that they cannot drift apart.

  SIGKILL comes terminationGracePeriodSeconds after the deletion of the pod, the preStop hook counts:

  |-- preStop --|-- grace: still accepting --|-- running requests end --|-- teardown --|
                SIGTERM                                                 its drain.timeoutSeconds are over
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
{{- fail (printf "terminationGracePeriodSeconds is %d, but preStop, drain and teardown take up to %d: leave it null, or lower drain.*Seconds." (int $given) $least) -}}
{{- end -}}
{{- int $given -}}
{{- end -}}
{{- end -}}

{{- define "minisgl.drainArgs" -}}
- --drain-grace={{ int .Values.drain.graceSeconds }}
- --drain-timeout={{ int .Values.drain.timeoutSeconds }}
{{- end -}}

{{/* The sleep action is the kubelet's own: no shell in the image is needed. */}}
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

{{/* Over the start-up budget: a slow but healthy load must not be called a failed rollout. */}}
{{- define "minisgl.progressDeadlineSeconds" -}}
{{- add .Values.startup.budgetSeconds .Values.minReadySeconds (include "minisgl.leastGracePeriod" .) 60 -}}
{{- end -}}

{{- define "minisgl.probes" -}}
startupProbe:
  httpGet: {path: /readyz, port: http}
  periodSeconds: {{ .Values.startup.periodSeconds }}
  timeoutSeconds: 5
  failureThreshold: {{ include "minisgl.startupFailures" . }}
readinessProbe:
  httpGet: {path: /readyz, port: http}
  {{- toYaml .Values.readiness | nindent 2 }}
livenessProbe:
  httpGet: {path: /livez, port: http}
  {{- toYaml .Values.liveness | nindent 2 }}
{{- end -}}
