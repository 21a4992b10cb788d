{{/* How processes and KEDA find the store. */}}

{{- define "millstream.valkeyName" -}}
{{ include "millstream.fullname" . }}-valkey
{{- end }}

{{/* (root, component) -> the URL that a process logs in by: its own where there is a key of its own, else everybody's */}}
{{- define "millstream.redisUrlEnv" -}}
{{- $redis := .root.Values.redis -}}
- name: MILLSTREAM_REDIS_URL
{{- if $redis.url }}
  value: {{ $redis.url | quote }}
{{- else if $redis.existingSecret.name }}
  {{- $own := get $redis.existingSecret.urlKeys .component }}
  valueFrom:
    secretKeyRef: {name: {{ $redis.existingSecret.name }}, key: {{ default $redis.existingSecret.urlKey $own }}}
{{- else }}
  valueFrom:
    secretKeyRef: {name: {{ include "millstream.valkeyName" .root }}, key: url}
{{- end }}
{{- end }}

{{- define "millstream.celeryUrlEnv" -}}
{{- with .Values.celery }}
{{- if .existingSecret -}}
- name: MILLSTREAM_CELERY_URL
  valueFrom:
    secretKeyRef: {name: {{ .existingSecret }}, key: {{ .key }}}
{{- end }}
{{- end }}
{{- end }}

{{/* host:port that KEDA dials. */}}
{{- define "millstream.redisAddress" -}}
{{- if .Values.redis.address -}}
{{ .Values.redis.address }}
{{- else if .Values.redis.url -}}
{{- $host := (urlParse .Values.redis.url).host -}}
{{ ternary $host (printf "%s:6379" $host) (regexMatch ":[0-9]+$" $host) }}
{{- else -}}
{{ include "millstream.valkeyName" . }}.{{ .Release.Namespace }}.svc:6379
{{- end -}}
{{- end }}

{{/* Number of the database: the URL's path. KEDA takes it apart from the address. */}}
{{- define "millstream.redisDatabase" -}}
{{- $path := "" -}}
{{- if .Values.redis.url -}}{{- $path = (urlParse .Values.redis.url).path | trimPrefix "/" -}}{{- end -}}
{{ default "0" $path }}
{{- end }}

{{- define "millstream.redisTls" -}}
{{- if or .Values.redis.tls.enabled (regexMatch "^rediss[:+]" .Values.redis.url) -}}true{{- end -}}
{{- end }}

{{/* Entries of KEDA's TriggerAuthentication; empty where the store asks for nothing. */}}
{{- define "millstream.redisCredentials" -}}
{{- $secret := .Values.redis.existingSecret -}}
{{- if .Values.redis.bundled.enabled }}
- {parameter: password, name: {{ include "millstream.valkeyName" . }}, key: password}
{{- else if $secret.name }}
{{- with $secret.usernameKey }}
- {parameter: username, name: {{ $secret.name }}, key: {{ . }}}
{{- end }}
{{- with $secret.passwordKey }}
- {parameter: password, name: {{ $secret.name }}, key: {{ . }}}
{{- end }}
{{- end }}
{{- with .Values.redis.tls.secretName }}
- {parameter: ca, name: {{ . }}, key: ca.crt}
{{- if $.Values.redis.tls.clientCertificate }}
- {parameter: cert, name: {{ . }}, key: tls.crt}
- {parameter: key, name: {{ . }}, key: tls.key}
{{- end }}
{{- end }}
{{- end }}
