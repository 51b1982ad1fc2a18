"""Find a broken setup before a week of training does: `rollout`, `server`, `compare`, `inspect`."""
