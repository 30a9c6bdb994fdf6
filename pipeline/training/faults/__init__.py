"""What training does when something goes wrong."""
