"""Parameters that are sharded over ranks: DTensors, collectives, agreement of ranks, owners of whole tensors."""
