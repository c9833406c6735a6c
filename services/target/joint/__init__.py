"""What a core and fronts in processes of their own say to each other, and how. No grpc, no torch."""
