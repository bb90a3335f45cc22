"""Files are written beside the folder and moved in; a small class holds the paths."""


class Paths:
    def __init__(self, step, rank):
        self.final = f"step-{step:08d}"
        self.folder = f"{self.final}.tmp"
        self.loose = f"loose-{rank}"
        self.file = f"{self.folder}/rank-{rank}.safetensors"


def sharded_save(disk, step, shards, rank, world, barrier):
    paths = Paths(step, rank)
    if disk.exists(paths.loose):
        disk.remove(paths.loose)
    if rank == 0 and disk.exists(paths.folder):
        disk.remove(paths.folder)
    barrier()
    if rank == 0:
        disk.mkdir(paths.folder)
    barrier()
    disk.write(paths.file, shards)
    disk.sync(paths.file)
    barrier()
    if rank == 0:
        disk.rename(paths.folder, paths.final)
        disk.sync(".")
    barrier()
