"""The optimizers whose runs can be continued: how each is known, the rules that equal it, what its state is here."""

from __future__ import annotations

from collections.abc import Mapping

from thalweg.torch.peers import options
from thalweg.torch.peers.formats import Peer, decoded, dequantized, factors, plain, statistics

MOMENTUM = {"momentum_buffer": "momentum_buffer"}
MOMENTS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
LARGEST = {**MOMENTS, "max_exp_avg_sq": "max_exp_avg_sq"}
SQUARES = {"row_var": "row_var", "col_var": "col_var", "variance": "variance"}
ROWS = {"exp_avg_sq_row": "row_var", "exp_avg_sq_col": "col_var", "exp_avg_sq": "variance", "exp_avg": "exp_avg"}
SHORT_ROWS = {"exp_avg_sq_r": "row_var", "exp_avg_sq_c": "col_var", "exp_avg_sq": "variance", "exp_avg": "exp_avg"}
FACTORS = {"momentum_buffer": "momentum_buffer", "Q": "Q"}

TABLE = (
    Peer(
        "torch.SGD",
        tells="momentum dampening weight_decay nesterov maximize",
        equal={"SGD": options.sgd, "LARS": options.sgd_as_lars},
        state=(MOMENTUM, plain),
        counts="nowhere",
    ),
    Peer(
        "torch.Adam",
        tells="betas eps weight_decay amsgrad maximize",
        where={"decoupled_weight_decay": False},
        equal={"AdamW": options.adam(decoupled=False), "LAMB": options.adam_as_lamb(decoupled=False)},
        state=(LARGEST, plain),
    ),
    Peer(
        "torch.AdamW",
        tells="betas eps weight_decay amsgrad maximize",
        where={"decoupled_weight_decay": True},
        equal={"AdamW": options.adam(decoupled=True), "LAMB": options.adam_as_lamb(decoupled=True)},
        state=(LARGEST, plain),
    ),
    Peer(
        "torch.Adafactor",
        tells="beta2_decay eps d weight_decay maximize",
        equal={"Adafactor": options.torch_adafactor},
        state=(SQUARES, statistics),
        axes=options.last_axes,
    ),
    Peer(
        "torch.Muon",
        tells="momentum nesterov weight_decay ns_coefficients ns_steps eps adjust_lr_fn",
        equal={"Muon": options.torch_muon},
        state=(MOMENTUM, plain),
        counts="nowhere",
    ),
    Peer(
        "transformers.Adafactor",
        tells="eps clip_threshold decay_rate beta1 scale_parameter relative_step warmup_init",
        equal={"Adafactor": options.hf_adafactor},
        state=(ROWS, statistics),
        axes=options.last_axes,
    ),
    Peer(
        "timm.Adafactor",
        tells="eps eps_scale clip_threshold decay_rate beta1 scale_parameter relative_step warmup_init "
        "min_dim_size_to_factor",
        equal={"Adafactor": options.timm_adafactor},
        state=(ROWS, statistics),
        axes=options.timm_axes,
    ),
    Peer(
        "timm.AdafactorBigVision",
        tells="min_dim_size_to_factor decay_rate beta2_cap clipping_threshold unscaled_wd momentum eps weight_decay",
        equal={"Adafactor": options.big_vision},
        state=(SHORT_ROWS, statistics),
        axes=options.largest_axes,
    ),
    Peer(
        "timm.Lamb",
        tells="bias_correction betas eps weight_decay grad_averaging max_grad_norm trust_clip always_adapt",
        equal={"LAMB": options.timm_lamb},
        state=(MOMENTS, plain),
        counts="group",
    ),
    Peer(
        "timm.Lars",
        tells="momentum dampening weight_decay nesterov trust_coeff eps trust_clip always_adapt",
        equal={"LARS": options.timm_lars},
        state=(MOMENTUM, plain),
        counts="nowhere",
    ),
    Peer(
        "timm.Kron",
        tells="momentum weight_decay preconditioner_update_probability precond_lr precond_init_scale "
        "momentum_into_precond_update decoupled_decay flatten",
        equal={"Kron": options.timm_kron},
        state=(FACTORS, factors),
    ),
    Peer(
        "timm.Lion",
        tells="betas weight_decay caution corrected_weight_decay maximize",
        where={"eps": None},  # which groups of timm's Adam variants have, and those of Lion have not
        equal={"Lion": options.timm_lion},
        state=({"exp_avg": "exp_avg"}, plain),
        counts="nowhere",
    ),
    Peer(
        "bitsandbytes.AdamW",
        tells="betas eps weight_decay alpha t_alpha t_beta3",
        equal={"AdamW": options.bitsandbytes_adam},
        state=({"state1": "exp_avg", "state2": "exp_avg_sq"}, decoded),
    ),
    Peer(
        "torchao.Adam8bit",
        tells="betas eps weight_decay amsgrad",
        equal={"AdamW": options.torchao_adam(decoupled=False)},
        state=(LARGEST, dequantized),
    ),
    Peer(
        "torchao.AdamW8bit",
        tells="betas eps weight_decay amsgrad",
        equal={"AdamW": options.torchao_adam(decoupled=True)},
        state=(LARGEST, dequantized),
    ),
    Peer(
        "apex.FusedLAMB",
        tells="bias_correction betas eps weight_decay grad_averaging max_grad_norm",
        equal={"LAMB": options.apex_lamb},
        state=(MOMENTS, plain),
        counts="group",
    ),
    Peer(
        "kron_torch.Kron",
        tells="b1 weight_decay preconditioner_update_probability precond_lr precond_init_scale "
        "momentum_into_precond_update merge_dims",
        equal={"Kron": options.kron_torch},
        state=(FACTORS, factors),
    ),
    Peer(
        "pytorch_optimizer.AdaFactor",
        tells="betas weight_decay weight_decouple fixed_decay ams_bound scale_parameter relative_step warmup_init "
        "eps1 eps2",
        equal={"Adafactor": options.pytorch_optimizer_adafactor},
        state=(ROWS, statistics),
        counts="group",
        axes=options.last_axes,
    ),
    Peer(
        "pytorch_optimizer.Lamb",
        tells="betas eps weight_decay weight_decouple fixed_decay rectify grad_averaging adam",
        equal={"LAMB": options.pytorch_optimizer_lamb},
        state=(MOMENTS, plain),
        counts="group",
    ),
    Peer(
        "pytorch_optimizer.LARS",
        tells="momentum dampening weight_decay nesterov trust_coefficient",
        equal={"LARS": options.pytorch_optimizer_lars},
        state=(MOMENTUM, plain),
        counts="group",
    ),
    Peer(
        "pytorch_optimizer.Kron",
        tells="momentum weight_decay weight_decouple pre_conditioner_update_probability precondition_lr "
        "precondition_init_scale momentum_into_precondition_update",
        equal={"Kron": options.pytorch_optimizer_kron},
        state=(FACTORS, factors),
        counts="group",
    ),
)
#: By their names, as ``source=`` takes them.
PEERS: Mapping[str, Peer] = {peer.name: peer for peer in TABLE}
