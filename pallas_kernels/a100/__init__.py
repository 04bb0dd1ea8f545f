"""An A100 on paper: compiling for it on any machine, reading the machine code, and its roofline. No GPU is needed."""
