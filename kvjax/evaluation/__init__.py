"""What a cache is judged by: tasks with known answers, and the small model that can do them."""
