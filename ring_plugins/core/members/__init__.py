"""Who the ranks of a job are, and how they change while it runs. Without `on_failure`, they do not.

- `policy` is what the user chose, and whether that works where the job runs.
- `members` drops ranks that are lost, or were told to end (`preemption_notice`). All that this process has of the job
  follows.
- `join_descriptors` has what processes that join exchange with the members; core/joining lets them join.
- `changes` tells the script's functions and the log.

How the step goes on that a loss interrupts: control/mesh.py (who is left), collectives/recovery.py (communicators),
gradients/reducer.py (the step).
"""
