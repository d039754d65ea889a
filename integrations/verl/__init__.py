"""verl: the plug-in module, and a CPU platform for running real verl without an accelerator."""
