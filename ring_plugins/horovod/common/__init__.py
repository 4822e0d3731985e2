"""What Horovod's users import of `horovod.common`."""
