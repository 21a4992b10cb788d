{{/* What the pods of all processes have in common. `process` is gateway, dispatcher, pipelines, or a merged pool. */}}

{{/* (root, process, account, graceSeconds) -> head of a pod's spec */}}
{{- define "millstream.podSpec" -}}
serviceAccountName: {{ .account }}
automountServiceAccountToken: {{ default false .mountToken }}
enableServiceLinks: false # else a Service named `millstream` would set MILLSTREAM_PORT to tcp://...
terminationGracePeriodSeconds: {{ .graceSeconds }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .process.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .process.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- range $field := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" }}
{{- with get $.process $field }}
{{ $field }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}

{{- define "millstream.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* (root, process) -> metadata of a pod, without its name */}}
{{- define "millstream.podMetadata" -}}
labels:
  {{- with .process.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- include "millstream.labels" . | nindent 2 }}
{{- with .process.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* (root, component, process) -> environment of every process: the store, blobs, writable folders, the process's own settings */}}
{{- define "millstream.env" -}}
{{ include "millstream.redisUrlEnv" . }}
- name: MILLSTREAM_BLOB_URL
  value: {{ default "file:///var/lib/millstream/blobs" .root.Values.blobs.url | quote }}
- name: MILLSTREAM_DURABILITY
  value: {{ .root.Values.redis.durability | quote }}
- name: MILLSTREAM_DURABILITY_REPLICAS
  value: {{ .root.Values.redis.durabilityReplicas | quote }}
- name: MILLSTREAM_CACHE_DIR
  value: /var/cache/millstream
- name: HOME
  value: /tmp
{{- range $settings := list .root.Values.queue.settings .process.settings .process.engine }}
{{- range $field, $value := $settings }}
- name: MILLSTREAM_{{ upper $field }}
  value: {{ include "millstream.scalar" $value | quote }}
{{- end }}
{{- end }}
{{- with .root.Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "millstream.volumeMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /var/cache/millstream}
{{- if not .Values.blobs.url }}
- {name: blobs, mountPath: /var/lib/millstream/blobs}
{{- end }}
{{- if .Values.redis.tls.secretName }}
- {name: redis-tls, mountPath: /etc/millstream/redis-tls, readOnly: true}
{{- end }}
{{- end }}

{{/* (root, cache) -> volumes; `cache` is a pool's or nothing */}}
{{- define "millstream.volumes" -}}
- name: tmp
  emptyDir: {}
- name: cache
{{- if and .cache .cache.existingClaim }}
  persistentVolumeClaim: {claimName: {{ .cache.existingClaim }}}
{{- else }}
  emptyDir: {sizeLimit: {{ dig "size" "1Gi" (default dict .cache) }}}
{{- end }}
{{- if not .root.Values.blobs.url }}
- name: blobs
  persistentVolumeClaim: {claimName: {{ default (printf "%s-blobs" (include "millstream.fullname" .root)) .root.Values.blobs.claim.existingClaim }}}
{{- end }}
{{- with .root.Values.redis.tls.secretName }}
- name: redis-tls
  secret: {secretName: {{ . }}}
{{- end }}
{{- end }}
