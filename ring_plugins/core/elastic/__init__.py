"""The ranks of a job change while it runs; without `on_failure` they do not.

What the user chose is `policy`. `members` is how ranks that are lost or told to end (`notice`) are dropped, and how
everything that this process has of the job follows. Others join by `joining` on one host and by `joining_between_hosts`
on several; `join_offers` is what all tell each other then, and `handover` the training's state for the new ones. Of
each change the log gets a line (`wording`), and the script's functions are told (`changes`). Loops of broadcasts keep
to one process as their `root`.

How the step goes on that a loss interrupts: control/membership.py and control/mesh.py (who is left),
collectives/healing.py (communicators), gradients/repetition.py (the step).
"""
