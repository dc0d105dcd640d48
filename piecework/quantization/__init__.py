"""int8 weights and activations: numbers, checkpoint formats, quantise on load, calibration, writer."""
