"""What ranks do together: collectives over Horovod, gradient reduction, and replicas that stay consistent."""
