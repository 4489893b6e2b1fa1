"""The paper as pure functions on pytrees: specification, modes, presets, explanation."""
