"""What every command needs: jobs on cores or clusters, and errors a user can act on."""
