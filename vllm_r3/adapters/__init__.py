"""Hand rows over to trainers: `slime` (and vime) for rollouts, `megatron` for its RouterReplay."""
