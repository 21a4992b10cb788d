{{/* How processes and KEDA find the store. */}}

{{- define "millstream.valkeyName" -}}
{{ include "millstream.fullname" . }}-valkey
{{- end }}

{{- define "millstream.redisUrlEnv" -}}
- name: MILLSTREAM_REDIS_URL
{{- if .Values.redis.url }}
  value: {{ .Values.redis.url | quote }}
{{- else }}
  valueFrom:
    secretKeyRef:
      name: {{ .Values.redis.existingSecret.name | default (include "millstream.valkeyName" .) }}
      key: {{ ternary .Values.redis.existingSecret.urlKey "url" (ne .Values.redis.existingSecret.name "") }}
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
{{- if or .Values.redis.tls.enabled (hasPrefix "rediss://" .Values.redis.url) -}}true{{- end -}}
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
