"""What ``octavo experiment=kernels`` races: the frame, its instruments, and a module of races a group of kernels."""
