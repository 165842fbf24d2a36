"""Native code inside compiled programs, for ``make_step``: what of it there is on CPUs and GPUs, and where it serves.

``cpu`` and ``gpu`` admit parameters and step them; ``choice`` takes them or XLA's code, whatever a program is compiled
for; ``parts`` gives each device its part. They import kernels and programs, and nothing of the rest imports them.
"""
