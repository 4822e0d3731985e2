"""Who the ranks of a job are, and how they change while it runs. Without `on_failure`, they do not.

- `policy` is what the user chose, and whether that works where the job runs.
- `members` drops ranks that are lost, or were told to end (`preemption_notice`), and updates all that this process has
  of the job.
- `join_descriptors` describes what joiners and members exchange; core/joining lets joiners join.
- `changes` tells the script's functions and the log.

A loss interrupts a step. How that step goes on: control/mesh.py (who is left), collectives/recovery.py (communicators),
gradients/reducer.py (the step).
"""
