"""What other trainers call. Thin: each module speaks one trainer's language, and is imported by that trainer only."""
