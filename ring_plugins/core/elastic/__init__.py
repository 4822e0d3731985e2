"""How the ranks of a job change while it runs. Without `on_failure`, they do not.

- `policy` is what the user chose, and whether that works where the job runs.
- `members` drops ranks that are lost, or were told to end (`preemption_notice`). All that this process has of the job
  follows.
- `joining` lets others join. `join_descriptors` has what they exchange with the members then, and `state_transfer`
  gives them the state of the training.
- `changes` tells the script's functions, and `wording` has the line for the log.
- `root` lets a loop of broadcasts keep to one process, whatever its rank becomes.

How the step goes on that a loss interrupts: control/mesh.py (who is left),
collectives/recovery.py (communicators), gradients/repetition.py (the step).
"""
