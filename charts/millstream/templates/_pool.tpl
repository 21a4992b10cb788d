{{/* (root, name) -> one pool of workers as YAML: the defaults, and over them what the pool says itself. */}}
{{- define "millstream.pool" -}}
{{- $pool := mustMergeOverwrite (deepCopy .root.Values.workerDefaults) (deepCopy (get .root.Values.workerPools .name)) -}}
{{- toYaml $pool -}}
{{- end }}

{{/* (root, name) -> name of the pool's Deployment and of what belongs to it. */}}
{{- define "millstream.poolName" -}}
{{ include "millstream.fullname" .root }}-worker-{{ .name }}
{{- end }}
