"""The race: optimizers side by side on a small task, each at the best of its learning rates.

``python -m thalweg.race`` runs it. Only drawing and the terminal need more than numpy.
"""
