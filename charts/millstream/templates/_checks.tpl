{{/* What the schema cannot say: values that are each fine and do not fit together. */}}
{{- define "millstream.checks" -}}
{{- $redis := .Values.redis -}}
{{- $sources := len (compact (list $redis.url $redis.existingSecret.name (ternary "bundled" "" $redis.bundled.enabled))) -}}
{{- if ne $sources 1 -}}
{{- fail "redis: set exactly one of redis.bundled.enabled=true, redis.url, redis.existingSecret.name" -}}
{{- end -}}
{{- $broker := (default dict .Values.celery).existingSecret -}}
{{- if and (regexMatch "^rediss?\\+cluster://" $redis.url) (not $broker) -}}
{{- fail "redis.url: a Cluster cannot carry the steps of runs: set celery.existingSecret to the URL of a server that is none" -}}
{{- end -}}
{{- if and (regexMatch "^rediss?\\+(cluster|sentinel)://" $redis.url) .Values.keda.enabled (not $redis.address) -}}
{{- range $name := keys .Values.workerPools | sortAlpha -}}
{{- if (include "millstream.pool" (dict "root" $ "name" $name) | fromYaml).lanes -}}
{{- fail (printf "workerPools.%s: lanes are given, and KEDA cannot follow sentinels or a Cluster by redis.url: leave lanes empty" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.blobs.url .Values.blobs.claim.existingClaim -}}
{{- fail "blobs: set blobs.url or blobs.claim.existingClaim, not both" -}}
{{- end -}}
{{- $hpa := .Values.gateway.autoscaling -}}
{{- if gt (int $hpa.minReplicas) (int $hpa.maxReplicas) -}}
{{- fail "gateway.autoscaling: minReplicas is above maxReplicas" -}}
{{- end -}}
{{- if and .Values.gateway.ingress.enabled (not .Values.gateway.ingress.hosts) -}}
{{- fail "gateway.ingress: enabled, but gateway.ingress.hosts is empty" -}}
{{- end -}}
{{- range .Values.extraEnv -}}
{{- if hasPrefix "MILLSTREAM_" .name -}}
{{- fail (printf "extraEnv: %s is a setting: write it under `settings` of its process, or a pool's `engine`" .name) -}}
{{- end -}}
{{- $secret := regexMatch "(?i)(^|_)(secret|token|password|passwd|credentials?|api_?key|access_?key)(_|$)" .name -}}
{{- if and .value $secret (not (hasSuffix "_FILE" .name)) -}}
{{- fail (printf "extraEnv: %s looks like a secret: give it by valueFrom.secretKeyRef" .name) -}}
{{- end -}}
{{- end -}}
{{- $aliasOfLane := dict -}}
{{- range $name := keys .Values.workerPools | sortAlpha -}}
{{- $pool := include "millstream.pool" (dict "root" $ "name" $name) | fromYaml -}}
{{- $where := printf "workerPools.%s" $name -}}
{{- if gt (int $pool.replicas.min) (int $pool.replicas.max) -}}
{{- fail (printf "%s: replicas.min %d is above replicas.max %d" $where (int $pool.replicas.min) (int $pool.replicas.max)) -}}
{{- end -}}
{{- if gt (int $pool.scaling.fallbackReplicas) (int $pool.replicas.max) -}}
{{- fail (printf "%s: scaling.fallbackReplicas is above replicas.max" $where) -}}
{{- end -}}
{{- range $pool.lanes -}}
{{- $lane := include "millstream.scalar" . -}}
{{- $other := get $aliasOfLane $lane -}}
{{- if and $other (ne $other $pool.alias) -}}
{{- fail (printf "%s: lane %s belongs to alias %q of another pool; a lane has one alias" $where $lane $other) -}}
{{- end -}}
{{- $_ := set $aliasOfLane $lane $pool.alias -}}
{{- end -}}
{{- if and $.Values.keda.enabled $pool.lanes $redis.existingSecret.name (not $redis.address) -}}
{{- fail (printf "%s: lanes are given, and KEDA cannot read a URL from a Secret: set redis.address to host:port" $where) -}}
{{- end -}}
{{- end -}}
{{- end }}
