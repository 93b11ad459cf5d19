"""What a call runs on: scratch memory (`arena`) and worker threads (`pool`). Neither knows anything of attention."""
