"""The dry run of gradient exchange: what each strategy would cost on a network, on plain data."""
