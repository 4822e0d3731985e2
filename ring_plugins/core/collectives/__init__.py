"""Collectives on host memory.

`api` defines the interface of communicators. `host` implements it for several ranks and `single` for one. `host` uses
`executor` (order), `shm_group` with `shm_barrier` (inside a host), `net_group` with `algorithms` (between hosts),
`hierarchical` (both together), `fingerprint` and `validation` (what must be equal on all ranks).
"""
