{{/* Names. The longest is <fullname>-worker-<pool>: 35 + 8 + 20 characters, the 63 that a label may have. */}}

{{- define "millstream.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 35 | trimSuffix "-" -}}
{{- end }}

{{- define "millstream.fullname" -}}
{{- $name := include "millstream.name" . -}}
{{- $default := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default $default .Values.fullnameOverride | trunc 35 | trimSuffix "-" -}}
{{- end }}

{{/* (root, component[, pool]) -> what a selector matches; never changes over a release's life. */}}
{{- define "millstream.selector" -}}
app.kubernetes.io/name: {{ include "millstream.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
millstream-pool: {{ . }}
{{- end }}
{{- end }}

{{- define "millstream.labels" -}}
{{ include "millstream.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "millstream.gatewayUrl" -}}
http://{{ include "millstream.fullname" . }}-gateway.{{ .Release.Namespace }}.svc:{{ include "millstream.scalar" .Values.gateway.service.port }}
{{- end }}

{{/* The Secret with the gateway's API keys: the operator's, or the one drawn below. */}}
{{- define "millstream.apiKeysSecret" -}}
{{ default (printf "%s-api-keys" (include "millstream.fullname" .)) .Values.gateway.auth.existingSecret }}
{{- end }}

{{/* (root, secret, key) -> the value that the cluster holds, or a fresh one: drawn at the first install, kept at upgrades.
Rendered outside the cluster it is fresh each time; there, bring a Secret of your own. */}}
{{- define "millstream.drawn" -}}
{{- $held := lookup "v1" "Secret" .root.Release.Namespace .secret | default dict -}}
{{- default (randAlphaNum 40) (dig "data" .key "" $held | b64dec) -}}
{{- end }}

{{- define "millstream.image" -}}
{{- $image := .image -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ default .root.Chart.AppVersion $image.tag }}
{{- end -}}
{{- end }}

{{/* A value as text. Helm holds whole numbers of values files as floats, and would print 8388608 as 8.388608e+06. */}}
{{- define "millstream.scalar" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) -}}{{ int64 . }}{{- else -}}{{ . }}{{- end -}}
{{- end }}
