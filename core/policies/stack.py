import numpy as np
class StackAllocator:
    def __init__(self, total_units): self._f=list(range(1,total_units+1))[::-1]; self.total_units=total_units
    @property
    def free_units(self): return len(self._f)
    def allocate(self, units, near=None):
        return np.array([self._f.pop() for _ in range(units)],np.int32)
    def free(self, units): self._f += units.tolist()[::-1]
    def grow(self, units): self._f = list(range(self.total_units+1,self.total_units+units+1))[::-1]+self._f; self.total_units+=units
    def check(self):
        f=np.array(sorted(self._f),np.int32); assert len(set(self._f))==len(f); return f
