"""`tandem train`: a target writes conversations, and a draft learns to foresee them.

Stages, each resumable: synthesis (the target writes), training (states captured as they are needed),
export (z-lab's format). Must import neither grpc nor the services' engines: only the two models' weights.
"""
