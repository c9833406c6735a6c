"""How a step travels from target to drafter: one interface, one module per transport."""
