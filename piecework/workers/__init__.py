"""Workers: where programs run, in this process or in others."""
