"""Programs as captured graphs: static buffers, which sizes are captured, and their replay."""
